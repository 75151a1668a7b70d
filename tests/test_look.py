"""list and doctor: what they say of a host is what apply would find there."""


def test_doctor_fails_where_apply_would_for_want_of_the_kernel(stub_host, tool):
    config = stub_host.configure("local", require=True)
    looked = tool("doctor", "--local", "--config", config, "--json")
    applied = tool("apply", "--local", "--config", config, "--json")
    assert (looked.code, applied.code) == (5, 5) and looked.error["what"] == applied.error["what"]
    assert "in the way" in looked.host["summary"]


def test_doctor_says_what_a_missing_kernel_means_where_none_is_required(stub_host, tool):
    said = tool("doctor", "--local", "--config", stub_host.configure("local"), "--json")
    assert said.code == 0 and said.host["summary"] == "ready for apply"
    assert any("kernel" in line and "T > 0 uses sample-and-follow" in line for line in said.host["not_done"])


def test_doctor_says_that_it_left_out_the_kernel_as_apply_would(stub_host, tool):
    said = tool("doctor", "--site-packages", stub_host.site_packages, "--json")
    (probe,) = [step for step in said.host["steps"] if step["name"] == "kernel probe"]
    assert said.code == 0 and "not tried, nor would apply try it: a tree of files" in probe["detail"]


def test_the_last_line_of_list_tells_a_patched_tree_from_a_pristine_one(stub_host, tool):
    def last_line() -> str:
        return tool("list", "--site-packages", stub_host.site_packages).stdout.splitlines()[-1]

    assert last_line() == "sglang 0.5.11: not patched; series sglang-0.5.11 can be applied"
    assert tool("apply", "--site-packages", stub_host.site_packages).code == 0
    assert last_line() == "sglang 0.5.11: patched: series sglang-0.5.11, stage temperature"
