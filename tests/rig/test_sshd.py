"""The rig's sshd lets the rig's client in, and nobody else."""

import subprocess


def ssh(server, *argv, config=None):
    return subprocess.run(
        ["ssh", "-F", config or server.ssh_config, server.alias, *argv], capture_output=True, timeout=60, check=False
    )


def test_runs_a_command_and_refuses_a_strange_key(sshd, tmp_path):
    server = sshd()
    assert ssh(server, "echo", "hello").stdout == b"hello\n"
    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", stranger], check=True)
    config = tmp_path / "config"
    config.write_text(server.ssh_config.read_text().replace(str(server.client_key), str(stranger)))
    refused = ssh(server, "true", config=config)
    assert refused.returncode == 255 and b"Permission denied" in refused.stderr


def test_several_hosts_and_a_restart(sshd):
    first, second = sshd(alias="one"), sshd(alias="two", address="127.0.0.2")
    assert ssh(second, "echo", "two").stdout == b"two\n"
    first.stop()
    assert ssh(first, "true").returncode == 255
    first.start()
    assert ssh(first, "echo", "one").stdout == b"one\n"
