"""Set-up of every test: shapes in annotations are checked at run time, and torch keeps to one thread."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the problems are tiny: a second thread only gets in the way

from jaxtyping import install_import_hook

# Before anything imports the package: the annotations of modules imported under the hook are checked.
install_import_hook("downweight", "typechecker.check")
