"""Sphinx configuration. `sphinx-build -n -W docs site`, which needs neither a GPU nor a network."""

import os
import sys
import warnings
from pathlib import Path
from urllib.parse import urlparse

from rmsnorm_ref import __version__
from rmsnorm_ref.measure.provenance import commit
from rmsnorm_ref.review.rules import SITE

sys.path.append(str(Path(__file__).parent / "_ext"))

project = "rmsnorm_ref"
author = "The rmsnorm_ref authors"
version = release = __version__

# The commit of this build: the host of the site says it, or git does.
_commit, _clean, _ = commit()
_commit = os.environ.get("READTHEDOCS_GIT_COMMIT_HASH") or _commit
_changed = "" if _clean or "READTHEDOCS" in os.environ else ", with changes"
built_from = f"commit {_commit[:7]}{_changed}" if _commit else "no commit known"
copyright = f"2026, {author}. Version {release}, {built_from}"  # the theme's footer shows it

# Where this build stands: its host says it. A citation names the version's own address there, or,
# from a build of somebody's own, on the published site.
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
_root = html_baseurl.rstrip("/").rpartition("/")[0] or SITE
citation_base = f"{_root}/v{release}/"

extensions = [
    "accessible",  # docs/_ext, like the next fourteen
    "breaks",
    "fresh",
    "facts",
    "claims",
    "head",
    "recorded",
    "kernels",
    "rules",
    "mathml",
    "plain_docstrings",
    "results_tables",
    "pinned_tables",
    "race",
    "run_code",
    "myst_parser",
    "notfound.extension",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "sphinxext.opengraph",
]
nitpicky = True  # also where the caller forgets -n
exclude_patterns = ["_build", "_inv", "auto_examples/*.py.md5", "auto_examples/*.ipynb"]

# Prose is MyST. Citable places carry an explicit label, never one made from a heading.
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
html_math_renderer = "mathml"

# Links into other projects resolve against the committed inventories; docs/_ext/inventories.py
# writes them.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "_inv/python.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "_inv/pytorch.inv"),
}

toc_object_entries_show_parents = "hide"
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
    "within_subsection_order": "gallery_order.Argument",
    "abort_on_example_error": True,
    "backreferences_dir": "gen_modules/backreferences",
    "doc_module": ("rmsnorm_ref",),
    "image_srcset": ["2x"],
    "image_scrapers": ("gallery_images.scraper",),
    "thumbnail_size": (240, 168),  # shown at 160 x 112; larger ones make the index heavy
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
html_favicon = "_static/icon.svg"
html_copy_source = False
html_show_sphinx = False

# Social cards are drawn here while the site builds, with matplotlib; nobody is asked for one.
ogp_site_url = html_baseurl
ogp_site_name = "rmsnorm_ref"
ogp_enable_meta_description = False  # every page brings its own
ogp_social_cards = {"enable": True, "site_url": f"version {release}", "line_color": "#2a6f97"}

# The host serves the 404 page at any depth, so its links start at the root of the site.
notfound_urls_prefix = urlparse(html_baseurl).path or "/"
