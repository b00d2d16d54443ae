"""MariaDB's command lines, and the tables that it needs.

`mariadb-install-db` would do as well; it also fills the tables of its help texts, which takes
three times as long as all the rest.
"""

from __future__ import annotations

import os
from pathlib import Path

from minicluster.config import Plan
from minicluster.errors import ClusterError
from minicluster.layout import Layout

_SQL_FOLDERS = (Path("/usr/share/mysql"), Path("/usr/share/mariadb"))
_SQL_FILES = (
    "system_tables.sql",
    "performance_tables.sql",
    "system_tables_data.sql",
)


def _shared(layout: Layout) -> list[str]:
    """Small, and careless about power cuts: the data is thrown away by `down`."""
    options = [
        "--no-defaults",
        f"--datadir={layout.database}",
        "--innodb-log-file-size=8M",
        "--innodb-data-file-path=ibdata1:4M:autoextend",
        "--innodb-temp-data-file-path=ibtmp1:4M:autoextend",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-doublewrite=0",
        "--innodb-flush-method=nosync",
        "--skip-name-resolve",
    ]
    return [*options, "--user=root"] if os.geteuid() == 0 else options


def sql() -> bytes:
    """The statements that make the system tables, from MariaDB's own files."""
    parts = [b"USE mysql;\n"]
    for name in _SQL_FILES:
        # Called mysql_... up to MariaDB 10.11, mariadb_... after it.
        found = [path for folder in _SQL_FOLDERS for path in folder.glob(f"m*_{name}")]
        if not found:
            raise ClusterError(f"mariadb-server-core has no file m*_{name}; is it whole?")
        parts.append(found[0].read_bytes())
    return b"".join(parts)


def bootstrap_command(layout: Layout) -> list[str]:
    return ["mariadbd", *_shared(layout), "--bootstrap"]


def serve_command(plan: Plan) -> list[str]:
    at = plan.layout
    return [
        "mariadbd",
        *_shared(at),
        f"--socket={at.run}/db.sock",
        f"--pid-file={at.run}/mariadbd.pid",
        "--bind-address=127.0.0.1",
        f"--port={plan.ports.mariadb}",
        "--innodb-buffer-pool-size=64M",
        "--innodb-lock-wait-timeout=900",
        f"--init-file={at.database_sql}",
    ]
