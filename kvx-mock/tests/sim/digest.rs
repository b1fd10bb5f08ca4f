//! The same seed gives the same event log: in other processes, and in other builds.

use std::process::Command;

use crate::run;

/// What the event logs of the workload come to. `./test` runs this test in a debug build and in a release build, so both
/// must give this number.
///
/// It changes with the form of the event log, with the order in which the fabric draws, and with the scenario. If one of these was
/// meant to change, put the new number here and say why in the commit. If none was, something is not deterministic: see
/// `docs/determinism.md`.
const RECORDED: u64 = 0xaf02_94b8_6efd_9f84;

/// Set for a child, which only prints.
const CHILD: &str = "KVX_DIGEST_CHILD";

/// Ten runs, two of each preset.
fn workload() -> u64 {
    (0..10).fold(0, |sum: u64, seed| {
        let report = run(seed);
        sum.rotate_left(9) ^ report.fabric.digest()
    })
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a child is told by a variable that it is one")]
fn other_processes_and_builds_give_the_same() {
    let digest = workload();
    if std::env::var_os(CHILD).is_some() {
        println!("digest {digest:#018x}.");
        return;
    }
    let child = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "digest::other_processes_and_builds_give_the_same"]);
        let output = command.arg("--nocapture").env(CHILD, "1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let digest = text.split("digest 0x").nth(1).and_then(|rest| rest.split('.').next());
        u64::from_str_radix(digest.unwrap_or_else(|| panic!("no digest: {text}")), 16).unwrap()
    };
    let children = [child(), child()];
    assert_eq!(children, [digest; 2], "another process gives another event log");
    assert_eq!(
        digest, RECORDED,
        "{digest:#018x} is not what was recorded: see the comment at RECORDED"
    );
}
