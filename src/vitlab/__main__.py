"""`python -m vitlab`, so that `torchrun -m vitlab` can start every command as well."""

from vitlab.cli import main

if __name__ == "__main__":
    main()
