"""A reference kernel package: fused RMSNorm, forward and backward, in Triton.

`rmsnorm(x, w)` is a differentiable function, `RMSNorm(N)` the module around it. Importing this
package touches neither CUDA nor Triton; the kernels are loaded by the first call.
"""

from .op import RMSNorm, rmsnorm

__version__ = "0.1.0"
__all__ = ["RMSNorm", "__version__", "rmsnorm"]
