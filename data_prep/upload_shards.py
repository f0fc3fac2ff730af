"""Check shards and publish them: the last stage of data preparation.

    export S3_ENDPOINT_URL=http://127.0.0.1:8333 AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...
    python data_prep/upload_shards.py shards s3://bucket/prefix

The same functions as ``agentft shards verify`` and ``agentft shards upload``. A cut upload goes on where it stopped.
"""

import argparse

from agentft.data.upload import upload_shards
from agentft.data.verify import verify_shards


def main() -> None:
    """Parse the arguments, verify every sample, upload, print what was sent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="folder that write_shards.py wrote")
    parser.add_argument("remote", help="s3://BUCKET/PREFIX or another folder")
    parser.add_argument("--workers", type=int, default=8, help="files sent at the same time")
    arguments = parser.parse_args()

    verify_shards(arguments.folder, progress=True)
    report = upload_shards(arguments.folder, arguments.remote, workers=arguments.workers, progress=True)
    print(f"{report.remote}: {report.uploaded} sent, {report.skipped} there already, {report.seconds:.1f} s")


if __name__ == "__main__":
    main()
