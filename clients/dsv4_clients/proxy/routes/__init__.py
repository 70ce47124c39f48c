"""HTTP routes, one module an endpoint family."""
