"""`python -m distributed_training` is `dtrain`."""

from distributed_training.cli.main import main

if __name__ == "__main__":
    main()
