"""Sphinx configuration. `sphinx-build -n -W docs site`, which needs neither a GPU nor a network."""

import sys
import warnings
from pathlib import Path

from rmsnorm_ref import __version__

sys.path.append(str(Path(__file__).parent / "_ext"))

project = "rmsnorm_ref"
author = "The rmsnorm_ref authors"
version = release = __version__
copyright = f"2026, {author}. Version {release}"  # the theme's footer shows this line

extensions = [
    "facts",  # docs/_ext, like the next three
    "rules",
    "mathml",
    "plain_docstrings",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
nitpicky = True  # also where the caller forgets -n
exclude_patterns = ["_inv", "auto_examples/*.py.md5", "auto_examples/*.ipynb"]

# Prose is MyST. Citable places carry an explicit label, never one made from a heading.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
html_math_renderer = "mathml"

# Links into other projects resolve against the committed inventories; docs/_ext/inventories.py
# writes them.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "_inv/python.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "_inv/pytorch.inv"),
}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Source"]  # where a formula or a claim comes from
# Docstrings are Markdown-like in one respect: code stands between single backquotes.
default_role = "code"

# Every script says for itself where it ran; the warning would add a path of this machine.
warnings.filterwarnings("ignore", message="no GPU", category=RuntimeWarning)

# The kernels run while the site builds: a script that raises stops the build.
sphinx_gallery_conf = {
    "examples_dirs": "../gallery",
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "backreferences_dir": "gen_modules/backreferences",
    "doc_module": ("rmsnorm_ref",),
    "image_srcset": ["2x"],
    "capture_repr": (),
    "remove_config_comments": True,
    "show_signature": False,
    "download_all_examples": False,
    # The seconds a script takes interpreted say nothing about a kernel, so no page shows them.
    "min_reported_time": 1e9,
    "write_computation_times": False,
}

html_theme = "furo"
html_title = f"rmsnorm_ref {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
