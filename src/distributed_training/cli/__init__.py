"""One file per command of `dtrain`. Nobody imports this package."""
