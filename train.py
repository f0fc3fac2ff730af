"""Start a run: ``composer train.py yamls/agent/tiny-glm.yaml [key=value ...]`` (``-n 2`` for two processes).

Plain ``python train.py …`` and ``agentft train …`` do the same. Next to read: ``agentft/train/build.py``.
"""

import sys

from agentft.train.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
