"""The HTTP services: calls of other programs in, runs and models behind them."""
