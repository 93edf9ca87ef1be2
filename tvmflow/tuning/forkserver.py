"""What the server imports that workers are forked from; nothing else may import this module.

Importing tvm imports torch, where that is installed, which takes longer than all the rest. Workers have no use for it.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment] # Python's own way to say that there is no such module

from tvmflow.tuning import worker  # noqa: E402, F401 # after torch was ruled out
