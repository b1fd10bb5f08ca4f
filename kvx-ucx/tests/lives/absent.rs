//! A library that is not there, or not all of it.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::pair::skip;
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

/// The loader ends a process that opens a library whose file is too short: it is seen before, also of one that lies beside it.
pub(crate) fn a_library_that_is_cut_off_is_refused() {
    const NAMES: [&str; 4] = ["libucp.so.0", "libucs.so.0", "libuct.so.0", "libucm.so.0"];
    let folder = std::env::var_os("KVX_UCX_LIB").map(PathBuf::from).filter(|path| path.is_dir());
    let Some(folder) = folder else { return skip("KVX_UCX_LIB names no folder") };
    let copy = std::env::temp_dir().join(format!("kvx-ucx-cut-{}", std::process::id()));
    std::fs::create_dir_all(&copy).unwrap();
    for cut in NAMES {
        for name in NAMES {
            std::fs::copy(folder.join(name), copy.join(name)).unwrap();
        }
        let file = std::fs::File::options().write(true).open(copy.join(cut)).unwrap();
        let whole = file.metadata().unwrap().len();
        for left in [whole / 10 * 9, whole / 2, 5000] {
            file.set_len(left).unwrap();
            let mut program = Command::new(std::env::current_exe().unwrap());
            program
                .args(["--exact", "an_idle_pair_sleeps"])
                .env("KVX_UCX_LIB", &copy)
                .env_remove("KVX_REQUIRE");
            let output = program.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{cut}, {left} of {whole}: {}", output.status);
            let why = format!("{cut} is cut off: it has {left} bytes");
            assert!(
                said.contains(&why) && said.contains("install"),
                "{cut}, {left} of {whole}: {said}"
            );
        }
    }
    std::fs::remove_dir_all(&copy).unwrap();
}
