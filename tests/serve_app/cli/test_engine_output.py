"""What child processes and libraries print while engines run is in a file."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from pathlib import Path
from serve_app.cli.engine_output import engine_output_to
with engine_output_to(Path(sys.argv[1])) as terminal:
    os.system("echo a warning >&2; echo a line")
    terminal.print("half done")
print("after")
"""


def test_children_write_to_the_file_and_the_console_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "engines.log"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=True)
    assert path.read_text() == "a warning\na line\n"
    assert (done.stdout, done.stderr) == ("after\n", "half done\n")
