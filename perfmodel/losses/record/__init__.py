"""What of loss tables needs a real model: calibration rows and language-model losses (extra ``record``)."""
