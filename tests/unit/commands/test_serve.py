"""smoke-test: what it says of a server that fails."""


def test_a_server_that_this_tool_does_not_look_after_can_fail_the_suite(stub_host, tool):
    stub_host.start_server("--stub-mode", "greedy")
    config = stub_host.configure("local")
    config.write_text(config.read_text().replace('kind = "process"', 'kind = "none"'))
    said = tool("smoke-test", "--local", "--config", config, "--json")
    assert said.code == 7 and "diverse" in said.error["what"]
