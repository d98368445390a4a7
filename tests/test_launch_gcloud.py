"""tpu/launch with the real gcloud, over an API of this machine: see tests/fake_gcloud.py."""

import getpass
import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator

import pytest
from launch_bed import Bed, wait


class Server(http.server.ThreadingHTTPServer):
    """The API of a bed's TPU, in this process. It takes any token for an account."""

    def __init__(self, bed: Bed) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bed = bed


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers what gcloud asks of the TPU API (a node, its guest attributes) and of the compute API
    (the project)."""

    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        if "getGuestAttributes" in self.path:
            answer = {"guestAttributes": [{"queryValue": {"items": []}}]}
        elif "/nodes/" in self.path:
            answer = self.node()
        else:
            answer = self.project()
        content = json.dumps(answer).encode()

        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET
    do_PATCH = do_GET

    def node(self) -> dict:
        endpoints = []
        for address in ("127.0.0.10", "127.0.0.11"):
            external = {"externalIp": address}
            endpoints.append({"ipAddress": address, "accessConfig": external})
        return {
            "name": "projects/mine/locations/us-east5-b/nodes/my-tpu",
            "id": "77",
            "apiVersion": "V2",
            "acceleratorType": "v5litepod-8",
            "health": "HEALTHY",
            "state": self.server.bed.tpu["state"],
            "networkEndpoints": endpoints,
        }

    def project(self) -> dict:
        """Returns a project that has the client's key already, so that gcloud does not bring it to
        the VM."""
        me = getpass.getuser()
        key = self.server.bed.client_home / ".ssh/google_compute_engine.pub"
        public = ""
        if key.exists():
            public = " ".join(key.read_text().split()[:2])
        items = [{"key": "ssh-keys", "value": f"{me}:{public} {me}"}]
        return {
            "kind": "compute#project",
            "name": "mine",
            "commonInstanceMetadata": {"items": items},
        }

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def environment(bed) -> Iterator[dict[str, str]]:
    """The variables of a client whose gcloud is the real one and asks a server of this machine."""
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        pytest.skip("needs gcloud")
    (bed.bin / "gcloud").unlink()
    (bed.bin / "gcloud").symlink_to(os.path.realpath(gcloud))
    (bed.client_home / ".ssh").mkdir(mode=0o700)

    server = Server(bed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    api = f"http://127.0.0.1:{server.server_port}/"
    yield {
        "PATH": f"{bed.bin}:/usr/bin:/bin",
        "CLOUDSDK_CONFIG": f"{bed.folder}/config",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": api,
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": api + "compute/v1/",
    }
    server.shutdown()


FLAGS = ("--project", "mine", "--gcloud-flag=--ssh-flag=-v")


@pytest.mark.slow
def test_the_real_gcloud_without_an_account_is_explained(bed, environment):
    code, _, err = bed.run("status", *FLAGS, env=environment)
    assert code == 2
    assert "do not currently have an active account" in err
    assert "gcloud auth login" in err


@pytest.fixture
def logged_in(bed, environment) -> dict[str, str]:
    """The variables of a client whose gcloud has an account."""
    token = bed.folder / "token"
    token.write_text("none")
    return {**environment, "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(token)}


@pytest.mark.slow
def test_the_real_gcloud_trains_stops_and_resumes(bed, logged_in):
    data = "/my data/it's"
    client = bed.start(
        "train",
        "--run",
        "one",
        *FLAGS,
        args="steps=300 pause=0.05 burst=1",
        words=(f"DATA={data}",),
        env=logged_in,
    )
    wait(lambda: all(bed.starts()) and bed.processes(0, "\0follow\0"), 120)
    bed.drop_connections(0)
    code, out, err = bed.ended(client, 120)
    assert code == 0, err
    assert out == bed.log(0), err
    assert bed.starts() == [1, 1], err
    assert out.count("line 0") == 20000, err
    assert f"with {data!r}" in out
    assert "connected again" in err

    interrupted = bed.interrupt(bed.begin(*FLAGS, env=logged_in))
    assert "no process of the run is left" in interrupted
    assert bed.idle()
    assert bed.saved()
    assert "start one at 300 with" in bed.log(0), "resumed"


@pytest.mark.slow
def test_the_real_gcloud_tells_of_a_tpu_that_is_gone(bed, logged_in):
    bed.set(state="PREEMPTED")

    code, _, err = bed.run("status", *FLAGS, env=logged_in)
    assert code == 75
    assert "my-tpu is PREEMPTED" in err
