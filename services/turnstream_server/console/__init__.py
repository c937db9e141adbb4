"""Commands that read the store and print: runs, batches, ledger, evaluations and keys."""
