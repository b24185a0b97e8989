"""The site of docs/: its hooks, its generated reference, its screenshots."""
