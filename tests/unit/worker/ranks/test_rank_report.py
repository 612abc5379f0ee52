"""People are told who of the ranks takes how much, and what is off."""

from pathlib import Path

from hearth.shared.settings_from_env import load_settings
from hearth.worker.disk.file_names import is_of_today
from hearth.worker.disk.open_file_store import GB
from hearth.worker.ranks.follower_main import open_followed_store
from hearth.worker.ranks.leading_rank import rank_report
from hearth.worker.ranks.rank_link import RankRoom
from hearth.worker.ranks.start_ranks import OFF
from tests.helpers.records.disk_records import ROOT

HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.2"]


def test_each_rank_is_told_with_its_host_and_what_it_takes_of_what_it_may() -> None:
    report = rank_report(HOSTS, "tensor", 70, {1: RankRoom(100, 40), 2: RankRoom(100, 50)})
    assert (report["count"], report["split"]) == (3, "tensor")
    assert report["ranks"] == [
        {"rank": 0, "host": "10.0.0.1", "used_bytes": 70},
        {"rank": 1, "host": "10.0.0.2", "used_bytes": 40, "limit_bytes": 100},
        {"rank": 2, "host": "10.0.0.2", "used_bytes": 50, "limit_bytes": 100},
    ]
    assert report["off"] == OFF and all(OFF.values()), "each with its reason"


def test_each_rank_has_files_of_its_own_and_its_part_of_what_its_machine_allows(
    tmp_path: Path,
) -> None:
    environ = {"KV_CACHE_DIR": str(tmp_path), "MAX_KV_SIZE_GB": "12"}
    settings = load_settings(environ, None)
    stores = [open_followed_store(settings, rank, ROOT, "", HOSTS) for rank in (1, 2)]
    roots = [store.root for store in stores if store is not None]
    assert len({ROOT, *roots}) == 3, "no rank's file passes for another's"
    assert all(is_of_today(root.hex()) for root in roots)
    assert [store.bytes_max for store in stores if store is not None] == [6 * GB, 6 * GB]
    for store in stores:
        assert store is not None
        store.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-1-of-3", "rank-2-of-3"]
