"""Ceph's RGW, of Debian's packages: a stricter S3 server, for long tests."""

import contextlib
import datetime
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import obstore

from millrace.files import file_lock
from tests.buckets.servers import KEYS, free_ports, store_of

_KEY = "AQAAAAAAAAAAABAAMDEyMzQ1Njc4OTAxMjM0NQ=="
_CONFIG = """
[global]
fsid = {id}
mon_host = [v2:127.0.0.1:{0},v1:127.0.0.1:{1}]
public_network = 127.0.0.0/8
auth_allow_insecure_global_id_reclaim = false
osd_pool_default_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = 4294967296
run_dir = {folder}
pid_file = {folder}/$name.pid
log_file = {folder}/log
mon_data = {folder}/mon
osd_data = {folder}/osd
keyring = {folder}/keyring
rgw_frontends = beast endpoint=127.0.0.1:{2} tcp_nodelay=1
rgw_data = {folder}/rgw
[client.admin]
pid_file =
"""
_STEPS = """
monmaptool --create --addv a [v2:127.0.0.1:{0},v1:127.0.0.1:{1}] --fsid {id} {folder}/monmap
ceph-mon --mkfs -i a --monmap {folder}/monmap
ceph-mon -i a
ceph-osd -i 0 --mkfs --osd-uuid {id}
ceph osd new {id} 0
ceph osd crush add osd.0 1.0 host=h root=default
ceph-osd -i 0
radosgw -n client.rgw
radosgw-admin user create --uid=millrace --display-name=m --access-key={keys[0]} --secret={keys[1]}
"""


@contextlib.contextmanager
def ceph(folder: Path) -> Iterator[str]:
    """An RGW with its data in memory, one on a machine; gives the address of its S3 interface."""
    if shutil.which("radosgw") is None:
        raise RuntimeError("radosgw is missing: `make test-long` installs it")
    ports, values = free_ports(3), {"folder": folder, "id": "1" * 8 + "-1111" * 3 + "-" + "1" * 12}
    capable = f'key = {_KEY}\ncaps mon = "allow *"\ncaps osd = "allow *"\n'
    names = ("mon.", "osd.0", "client.admin", "client.rgw")
    (folder / "keyring").write_text("".join(f"[{name}]\n{capable}" for name in names))
    (folder / "ceph.conf").write_text(_CONFIG.format(*ports, **values))
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    environment = {**os.environ, "CEPH_CONF": f"{folder}/ceph.conf"}
    with file_lock("/tmp/millrace-ceph.lock"):  # it takes 4 GiB
        try:
            for step in _STEPS.strip().splitlines():
                command = step.format(*ports, **values, keys=[*KEYS.values()]).split()
                subprocess.run(command, env=environment, check=True, timeout=120)
            address = f"http://127.0.0.1:{ports[2]}"
            url = obstore.sign(store_of(address), "PUT", "", datetime.timedelta(minutes=5))
            urlopen(Request(url, method="PUT")).close()  # makes the bucket
            yield address
        finally:
            for path in folder.glob("*.pid"):
                os.kill(int(path.read_text()), signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
