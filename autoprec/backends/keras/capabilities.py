"""What autoprec has to know of Keras without importing it, or TensorFlow."""

from __future__ import annotations

from autoprec.backends.protocol import Capabilities
from autoprec.core.device.observation import DeviceKind

CAPABILITIES = Capabilities(
    title="Keras",
    model="a compiled keras.Model",
    backend_class="KerasBackend",
    model_modules=("keras", "tensorflow"),
    required_modules=("keras",),
    extra="tensorflow",
    import_advice="set KERAS_BACKEND=tensorflow",
    accelerator_builds="pip install 'tensorflow[and-cuda]' for NVIDIA GPUs",
    environment={
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # TensorFlow's first process on a GPU would take all of its memory, and there are several.
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    },
    # TensorFlow takes a number of threads once per process, so the search leaves them alone.
    knobs=("threads", "steps_per_execution"),
    searched_knobs=("steps_per_execution",),
    # XLA can double a small step's speed or lose all that bfloat16 gains; it takes seconds to try.
    compiles_on=tuple(DeviceKind),
    sessions_interfere=False,
    applies_without_model=True,
)
