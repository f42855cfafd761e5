"""Parameters: published when due, fetched once per replacement."""

from pipeline.params import ParamsPoller, ParamsPublisher, PublishConfig
from pipeline.store import LocalStore


def test_a_poller_gets_each_publication_once_and_nothing_before_the_first(tmp_path):
    store = LocalStore(tmp_path)
    poller = ParamsPoller(store, "r")
    publisher = ParamsPublisher(store, "r", PublishConfig())
    assert poller.poll() is None
    publisher.publish(b"one", 0)
    assert (poller.poll(), poller.poll()) == (b"one", None)
    publisher.publish(b"two", 25)
    publisher.publish(b"six", 50)
    assert (poller.poll(), poller.poll()) == (b"six", None)
    assert ParamsPoller(store, "r").poll() == b"six"


def test_publications_are_due_at_start_then_every_25_updates_but_at_most_every_2_seconds(tmp_path):
    now = [0.0]
    publisher = ParamsPublisher(LocalStore(tmp_path), "r", PublishConfig(), clock=lambda: now[0])
    assert publisher.is_due(0)
    publisher.publish(b"", 0)
    now[0] = 1.9
    assert not publisher.is_due(100)
    now[0] = 2.0
    assert publisher.is_due(25)
    assert not publisher.is_due(24)
