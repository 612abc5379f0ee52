"""Only URLs of public hosts go to a cloud model: LiteLLM itself fetches some of them."""

import pytest
import yaml

from hearth.proxy.gateway.cloud.cloud_urls import check_data, check_url, is_public_url
from hearth.shared.errors import RequestError
from hearth.shared.paths import PROJECT_DIR

URLS = yaml.safe_load((PROJECT_DIR / "tests/data/cloud_urls.yaml").read_text())


@pytest.mark.parametrize("url", URLS["public"])
def test_a_public_host_passes(url: str) -> None:
    assert is_public_url(url)
    check_url(url, "p")


@pytest.mark.parametrize("url", [*URLS["private"], "https://example.com/" + "a" * 5_000])
def test_anything_else_is_refused_with_its_place_and_a_remedy(url: str) -> None:
    assert not is_public_url(url)
    with pytest.raises(RequestError) as caught:
        check_url(url, "messages[0].content[1].image_url.url")
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert "data: URL" in str(caught.value)
    assert len(url) < 9 or url not in str(caught.value)


def test_data_passes_bare_or_as_a_url() -> None:
    check_url("data:image/png;base64,iVBO", "p")
    for data in ("iVBORw0KGgo=", "data:application/pdf;base64,JVBE"):
        check_data(data, "p")
    for url in ("http://169.254.169.254/", " gs://bucket/x"):
        with pytest.raises(RequestError):
            check_data(url, "p")
