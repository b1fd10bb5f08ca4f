//! A library that is not there.

use std::process::{Command, ExitCode};

use crate::subject::Ucx;

/// Set in the environment of a process that is to run the conformance kit instead.
const KIT: &str = "KVX_UCX_KIT";

pub(crate) const TEST: &str = "an_absent_library_is_a_reason_or_a_failure";

/// Runs the kit, if this process was started for that.
pub(crate) fn kit_if_asked() -> Option<ExitCode> {
    std::env::var_os(KIT)?;
    Some(kvx_tests::suite::run(&Ucx))
}

/// Without a library every test, here and of the kit, is ignored and says why; where `KVX_REQUIRE` names the backend, it fails.
pub(crate) fn an_absent_library_is_a_reason_or_a_failure() {
    for kit in [false, true] {
        for (required, fails) in [(None, false), (Some("mock"), false), (Some("mock,ucx"), true)] {
            let mut program = Command::new(std::env::current_exe().unwrap());
            program.args(["--skip", TEST]).env("KVX_UCX_LIB", "/nowhere/libucp.so.0");
            program.env_remove("KVX_REQUIRE").envs(required.map(|names| ("KVX_REQUIRE", names)));
            program.env_remove(KIT).envs(kit.then_some((KIT, "1")));
            let output = program.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            let what = format!("kit: {kit}, KVX_REQUIRE: {required:?}: {}\n{said}", output.status);
            assert_eq!(output.status.success(), !fails, "{what}");
            assert!(said.contains("/nowhere/libucp.so.0"), "no reason: {what}");
            assert!(said.contains("install"), "no remedy: {what}");
            assert!(said.contains(" 0 passed"), "{what}");
            assert_eq!(said.contains(" 0 failed"), !fails, "{what}");
            assert_eq!(said.contains("KVX_REQUIRE names"), fails, "{what}");
            assert_eq!(said.contains(" 0 ignored"), fails, "{what}");
        }
    }
}
