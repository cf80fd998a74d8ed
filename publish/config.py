"""What `bilinearize push` can be told; flags and YAML are derived from this dataclass."""

from dataclasses import dataclass


@dataclass
class PushConfig:
    """How a checkpoint goes to the hub. Values are checked by `bilinearize.publish.push.push`."""

    report: str | None = None
    """Folder of an evaluation of this checkpoint; its numbers and plot go into the card. A run's
    own is found by itself."""
    private: bool = False
    """Make the repository private, where it is new."""
    revision: str | None = None
    """Branch to push to; made if it isn't there. By default main."""
    update: bool = False
    """Replace the files of a repository that holds some already, in one commit."""
    license: str | None = None
    """Licence for the card, e.g. apache-2.0; by default the source's."""
    message: str = "Upload with bilinearize"
    """Commit message."""
    dry_run: bool = False
    """List what would go up, and stop."""
