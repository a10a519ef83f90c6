"""Other processes beside one that uses the op: data-loader workers, forked and spawned children."""

from __future__ import annotations

import os

import pytest
import torch
from paths import assert_same_bits, check, make
from test_interpreter import python
from torch.utils.data import DataLoader, Dataset

N_ITEMS = 4


class Rows(Dataset[torch.Tensor]):
    """Give row i from the process that loads it; the package is imported there too."""

    def __len__(self) -> int:
        """Count the rows."""
        return N_ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        """Draw row `index`."""
        import rmsnorm_ref

        assert rmsnorm_ref.rmsnorm
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_do_no_harm(method: str, device: str) -> None:
    """Between calls of the op, workers load rows, and both passes on them stay right."""
    check(*make(3, 64, torch.float32, device=device))
    loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context=method)
    loaded = []
    for x in loader:
        check(*(tensor.to(device) for tensor in (x, torch.ones(64), x)))
        loaded.append(x)
    assert_same_bits([torch.cat(loaded)], [torch.stack([Rows()[i] for i in range(N_ITEMS)])])


AFTER_FORK = """
import os, sys, torch
import rmsnorm_ref
from rmsnorm_ref import oracle, rmsnorm

def call():
    x, w = torch.randn(3, 64).requires_grad_(), torch.randn(64).requires_grad_()
    y = rmsnorm(x, w)
    y.sum().backward()
    with torch.no_grad():
        oracle.assert_within(y, oracle.truth(x, w), oracle.bound_y(x, w), "y")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("used_before", [False, True])
def test_the_op_runs_in_a_forked_child(used_before: bool) -> None:
    """A forked child calls the op, whether or not the parent did before the fork."""
    python(f"""{AFTER_FORK}
torch.set_num_threads(1)  # a fork does not carry torch's own threads over
{"call()" if used_before else ""}
child = os.fork()
call()
if not child:
    os._exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_the_import_works_in_a_forked_child() -> None:
    """The package can be imported, and called, first in a child."""
    python("""
import os, sys, torch
child = os.fork()
if not child:
    from rmsnorm_ref import rmsnorm
    assert rmsnorm(torch.ones(1, 8), torch.ones(8), 0.0).eq(1).all()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert "rmsnorm_ref" not in sys.modules
sys.exit(os.waitstatus_to_exitcode(status))
""")


@pytest.mark.gpu
def test_a_forked_child_of_a_gpu_process_fails_loudly() -> None:
    """CUDA does not outlive a fork: in a child the call raises, and returns no wrong result."""
    code = """
import os, sys, torch
from rmsnorm_ref import rmsnorm
x, w = torch.ones(3, 64, device="cuda"), torch.ones(64, device="cuda")
rmsnorm(x, w)
child = os.fork()
if not child:
    try:
        rmsnorm(x, w)
        torch.cuda.synchronize()
    except RuntimeError as error:
        os._exit(0 if "CUDA" in str(error) else 2)
    os._exit(1)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    python(code, CUDA_VISIBLE_DEVICES=visible, RMSNORM_REF_TUNING="fixed")
