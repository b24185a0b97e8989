"""Collection by other processes while this one learns, through Ray."""
