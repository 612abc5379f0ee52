"""`hearth worker` listens where it is told, and sets little beside the user's settings."""

import pytest
from hypothesis import given, strategies as st

from hearth.commands.worker.command import ListenEndpoint, listen_endpoint, variables_of
from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings


@pytest.mark.parametrize(
    "text",
    [
        *(
            "tcp://0.0.0.0",
            "tcp://0.0.0.0:0",
            "tcp://0.0.0.0:65536",
            "tcp://0.0.0.0:+1",
            "0.0.0.0:1",
        ),
        *("tcp://*:1", "tcp://localhost:1", "tcp://[::1]:1", "tcp://1.2.3:1", "tcp://0.0.0.0:1/"),
        *("tcp://0.0.0.0:\u0661", "tcp://0.0.0.0:01", " tcp://0.0.0.0:1", "0.0.0.0:1", ""),
    ],
)
def test_what_is_no_address_with_a_port_is_refused(text: str) -> None:
    with pytest.raises(StartError, match="nowhere to listen"):
        listen_endpoint(text)


@given(st.integers(1, 65535))
def test_a_worker_is_one_beside_no_other_whatever_the_settings_of_its_machine(port: int) -> None:
    of_a_proxy = {"WORKERS": "0", "WORKER_ENDPOINTS": "tcp://10.0.0.5:1", "PROXY_PORT": "4000"}
    own = variables_of(ListenEndpoint("0.0.0.0", port), "a/b")
    settings = load_settings(of_a_proxy | own, None)
    assert (settings.workers, list(settings.worker_endpoints)) == (1, [])
    assert settings.model_path == "a/b"
    assert settings.instance_dir == settings.run_dir / str(port)
    assert "MODEL_PATH" not in variables_of(ListenEndpoint("0.0.0.0", port), None)
