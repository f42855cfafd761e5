"""What a thing is: window geometry, specs, records, the Arrow schema of a shard, the terms of a dataset.

Needs numpy and pyarrow only, and holds no behaviour beyond arithmetic and validation.
"""
