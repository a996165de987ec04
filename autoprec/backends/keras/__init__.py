"""The Keras backend (TensorFlow, or Keras on torch)."""
