"""Workers that run the commands of hosted models: the operations of the Tinker API."""
