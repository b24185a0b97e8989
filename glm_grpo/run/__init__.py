"""The run folder: layout, atomic writes, stored tables and their checked readers, the lock."""
