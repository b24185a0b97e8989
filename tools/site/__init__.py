"""Tools for the site in docs/: hooks, generated reference pages and screenshots."""
