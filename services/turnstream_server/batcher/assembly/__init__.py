"""A plan and its payload become the encoded share of one rank, and files of the archive."""
