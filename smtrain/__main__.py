"""`python -m smtrain` is `smtrain`."""

from smtrain.cli import main

main()
