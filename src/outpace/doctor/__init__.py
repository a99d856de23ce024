"""Why a model is slow here, or not exact: measurements, each with a verdict and a remedy."""
