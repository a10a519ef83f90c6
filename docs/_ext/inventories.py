"""Write the small inventories in docs/_inv: `python docs/_ext/inventories.py`.

A link to a class of another project needs that project's inventory, which Sphinx would fetch at
every build. These files hold the few names our pages use, so that the build needs no network and
an unknown name is still an error. A new name goes into the table below.
"""

import zlib
from pathlib import Path

# project -> name -> (role, page). "$" in a page stands for the name, as in Sphinx's own format.
NAMES: dict[str, dict[str, tuple[str, str]]] = {
    "Python": {
        "bool": ("class", "library/functions.html#$"),
        "dict": ("class", "library/stdtypes.html#$"),
        "float": ("class", "library/functions.html#$"),
        "int": ("class", "library/functions.html#$"),
        "object": ("class", "library/functions.html#$"),
        "str": ("class", "library/stdtypes.html#$"),
        "tuple": ("class", "library/stdtypes.html#$"),
        "AssertionError": ("exception", "library/exceptions.html#$"),
        "FileNotFoundError": ("exception", "library/exceptions.html#$"),
        "NotImplementedError": ("exception", "library/exceptions.html#$"),
        "RuntimeError": ("exception", "library/exceptions.html#$"),
        "TypeError": ("exception", "library/exceptions.html#$"),
        "ValueError": ("exception", "library/exceptions.html#$"),
        "collections.abc.Iterable": ("class", "library/collections.abc.html#$"),
        "os.PathLike": ("class", "library/os.html#$"),
        "typing.Any": ("data", "library/typing.html#$"),
        "typing.Literal": ("data", "library/typing.html#$"),
        "typing.NamedTuple": ("class", "library/typing.html#$"),
    },
    "PyTorch": {
        "torch.Tensor": ("class", "tensors.html#$"),
        "torch.device": ("class", "tensor_attributes.html#$"),
        "torch.dtype": ("class", "tensor_attributes.html#$"),
        "torch.nn.Module": ("class", "generated/$.html#$"),
        "torch.nn.RMSNorm": ("class", "generated/$.html#$"),
        # The name by which autodoc finds the class that the public name stands for.
        "torch.nn.modules.module.Module": (
            "class",
            "generated/torch.nn.Module.html#torch.nn.Module",
        ),
    },
}


def inventory(project: str) -> bytes:
    """Return one project's inventory in version 2 of Sphinx's format."""
    header = (
        "# Sphinx inventory version 2\n"
        f"# Project: {project}\n"
        "# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    lines = (
        f"{name} py:{role} 1 {page.replace('$.html', name + '.html')} -\n"
        for name, (role, page) in sorted(NAMES[project].items())
    )
    return header.encode() + zlib.compress("".join(lines).encode())


if __name__ == "__main__":
    for project in NAMES:
        path = Path(__file__).parents[1] / "_inv" / f"{project.lower()}.inv"
        path.write_bytes(inventory(project))
