"""The HTTP routes, one file per noun. They translate; what they mean lies behind them."""
