"""The demo and the examples, run as a reader would run them."""
