"""What a model does and what that costs on the device at hand; needs torch."""
