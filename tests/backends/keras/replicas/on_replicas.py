"""Run by test_replicas in a process of its own, whose CPU is two devices to TensorFlow."""

from __future__ import annotations

import importlib
import json
import sys
import traceback

import keras
import tensorflow as tf

from tests.backends.keras.replicas.replica_pairs import CASES

for module in ("in_fit", "in_loops", "of_recipes"):
    importlib.import_module(f"tests.backends.keras.replicas.replicas_{module}")


def main() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
    tf.config.set_logical_device_configuration(cpu, two)
    failures = {}
    for name in sys.argv[1:] or CASES:
        keras.utils.clear_session(free_memory=False)
        try:
            CASES[name]()
        except BaseException:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
