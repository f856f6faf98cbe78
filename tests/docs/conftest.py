"""`dtrain` as a function, as the tests of the command line have it."""

from tests.cli.conftest import dtrain  # noqa: F401
