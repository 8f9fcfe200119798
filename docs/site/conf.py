"""Configuration of the site, read by Sphinx. ``build.py`` stages the pages and calls Sphinx."""

project = "Parallel training, built and measured"
html_title = project
author = "the authors of the course"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["**/README.md"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the committed outputs are shown
nb_merge_streams = True
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = "$ "
autodoc_member_order = "bysource"
autodoc_typehints = "description"
add_module_names = False
autodoc_default_options = {"exclude-members": "set"}  # matplotlib adds one to each Artist
