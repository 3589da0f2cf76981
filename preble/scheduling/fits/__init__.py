"""What timing samples say of a cost, compiled: the terms of samples, and the fit of factors to them."""
