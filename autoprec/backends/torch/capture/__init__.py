"""Tasks made of what a user has already: a model with its optimizer and loader, or a trainer.

What is given belongs to the task from then on: the model moves to the CPU and is never trained;
every model that is built is a copy of it. No trainer's package is imported here.
"""

from autoprec.backends.torch.capture.of_lightning import from_lightning
from autoprec.backends.torch.capture.of_transformers import from_transformers
from autoprec.backends.torch.capture.parts import from_parts

__all__ = ["from_lightning", "from_parts", "from_transformers"]
