"""The algorithm of R2D2 in torch: Kapturowski et al. 2019, and the article's options beside it.

Knows numbers and tensors only: no path, socket, clock or file format.
"""

from r2d2.portable import PortablePolicy, build_policy

__all__ = ["PortablePolicy", "build_policy"]
