"""What needs PyTorch and Transformers: calibration rows and language-model losses (extra ``record``)."""
