//! Choosing and opening with what is built in.

use kvx_connector::{Policy, choose};
use kvx_core::ErrorKind;

#[cfg(test)]
mod environment {
    use super::*;

    /// Runs a test of this module again, in a process of its own with these variables. `false` in that process.
    fn in_child(test: &str, variables: [(&str, &str); 2]) -> bool {
        const CHILD: &str = "KVX_TEST_CHILD";
        if std::env::var_os(CHILD).is_some() {
            return false;
        }
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("environment::{test}"), "--nocapture"])
            .envs(variables)
            .env(CHILD, "1")
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && printed.contains("1 passed"), "{output:?}");
        true
    }

    #[test]
    fn it_is_read() {
        if !in_child("it_is_read", [("KVX_BACKEND", "nope"), ("KVX_BACKEND_OPTIONS", "a=b")]) {
            let policy = Policy::from_env().unwrap();
            assert_eq!(policy.environment.as_deref(), Some("nope"));
            assert_eq!(policy.options.text("a"), Some("b"));
            let error = choose(&policy, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains("named_by=KVX_BACKEND"), "{error}");
        }
    }

    #[test]
    fn empty_is_none() {
        if !in_child("empty_is_none", [("KVX_BACKEND", ""), ("KVX_BACKEND_OPTIONS", "")]) {
            assert_eq!(Policy::from_env().unwrap(), Policy::default());
        }
    }

    #[test]
    fn bad_options_are_refused() {
        let variables = [("KVX_BACKEND", "mock"), ("KVX_BACKEND_OPTIONS", "device")];
        if !in_child("bad_options_are_refused", variables) {
            let error = Policy::from_env().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains("\"device\""), "{error}");
        }
    }
}

#[cfg(feature = "mock")]
mod mock {
    use kvx_connector::{ChoiceReason, Policy, choose, offers, open};
    use kvx_core::ErrorKind;

    #[test]
    fn the_mock_is_never_chosen_unasked() {
        // The peer has nothing else.
        let error = choose(&Policy::default(), Some(&["mock"])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("mock=never chosen unasked"), "{error}");
        assert!(!offers(&Policy::default()).unwrap().contains(&"mock".to_owned()));
    }

    #[test]
    fn by_name_it_is_chosen_and_opened_with_its_options() {
        let options = "preset=efa,seed=9".parse().unwrap();
        let policy = Policy { options, ..Policy::default() }.with_name(Some("mock"));
        assert_eq!(offers(&policy).unwrap(), ["mock"]);
        let choice = choose(&policy, Some(&["mock"])).unwrap();
        assert_eq!(choice.reason, ChoiceReason::Named);
        assert!(choice.detail.contains("seed 9"), "{choice}");
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let backend = runtime.block_on(open(&choice, &policy.options)).unwrap();
        assert_eq!(backend.name(), "mock");
        let efa = kvx_mock::Preset::efa();
        assert_eq!(backend.capabilities(), efa.capabilities());
        let error = runtime.block_on(open(&choice, &"sed=1".parse().unwrap())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}

#[cfg(all(feature = "shm", target_os = "linux"))]
mod shm {
    use kvx_connector::{Policy, choose, offers, open};

    #[test]
    fn it_needs_nothing_installed_so_it_is_chosen_unasked() {
        let own = offers(&Policy::default()).unwrap();
        let own = own.iter().find(|offer| offer.starts_with("shm@")).expect("it says where");
        let elsewhere = choose(&Policy::default(), Some(&["shm@another host/1"])).unwrap_err();
        assert!(elsewhere.to_string().contains("on different hosts"), "{elsewhere}");
        let choice = choose(&Policy::default(), Some(&[own, "mock"])).unwrap();
        assert_eq!(choice.registration.name, "shm");
        assert!(choice.detail.contains("borrowed memory"), "{choice}");
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let policy = Policy { options: "copy_threads=2".parse().unwrap(), ..Policy::default() };
        let backend = runtime.block_on(open(&choice, &policy.options)).unwrap();
        assert_eq!(backend.name(), "shm");
        runtime.block_on(backend.close()).unwrap();
    }
}

/// A rank that does not know its peers yet has all open that it may be asked for.
#[cfg(all(feature = "shm", feature = "mock", target_os = "linux"))]
#[tokio::test]
async fn a_rank_without_peers_opens_all_that_can_be_used_or_the_one_that_is_named() {
    use kvx_connector::{Policy, choose_every, open_every};
    use kvx_core::config::BackendConfig;

    let names = |policy: &Policy| {
        let every = choose_every(policy).unwrap();
        every.iter().map(|choice| choice.registration.name).collect::<Vec<_>>()
    };
    let open = Policy::default();
    let all = names(&open);
    assert_eq!(all[0], "shm", "what reaches this host only comes first: {all:?}");
    assert!(!all.contains(&"mock"), "never unasked: {all:?}");
    let mock = open.clone().with_name(Some("mock"));
    assert_eq!(names(&mock), ["mock"]);
    let unknown = choose_every(&open.clone().with_name(Some("nothing"))).unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Config);

    let mut choices = choose_every(&mock).unwrap();
    let wrong: BackendConfig = "preset=nothing".parse().unwrap();
    assert!(open_every(&choices, &wrong).await.is_err(), "none can be opened");
    // One that can is enough: these options are wrong for shared memory only.
    choices.insert(0, choose_every(&open).unwrap().swap_remove(0));
    let right: BackendConfig = "preset=rc".parse().unwrap();
    let opened = open_every(&choices, &right).await.unwrap();
    assert_eq!(opened.len(), 1);
    assert_eq!(opened[0].name(), "mock");
    opened[0].close().await.unwrap();
}
