"""`python -m resswap`, the same as `resswap`."""

from resswap.cli import main

main()
