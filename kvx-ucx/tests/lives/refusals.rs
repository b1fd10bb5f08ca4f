//! What is refused, by name.

use kvx_core::ErrorKind;
use kvx_core::backend::TransferBackend as _;
use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::pair::{Pair, alone, block, is_1_13, lasting_interface, meet_in_vain, open_with};
use crate::told::lines_of;

/// Known failure 98: TCP was taken where RDMA was wanted, and nobody said so.
pub(crate) fn what_is_required_is_enforced() {
    let device = lasting_interface();
    let other = open_with(&format!("devices={device}")).unwrap();
    let one = open_with(&format!("tls=tcp,devices={device},require=rc_*+dc_*")).unwrap();
    let pair = Pair::meet(&one, &other);
    let error = block(pair.one.connect(pair.at_one)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    let text = error.to_string();
    assert!(text.contains("require=rc_*+dc_*") && text.contains("chosen=tcp"), "{text}");
    // They may be here, and are kept out.
    let kept_out = format!("with tls=tcp and devices={device}");
    assert!(error.remedy().is_some_and(|remedy| remedy.contains(&kept_out)), "{text}");
    let one = open_with(&format!("tls=tcp,devices={device},require=tcp")).unwrap();
    let pair = Pair::meet(&one, &other);
    block(pair.one.connect(pair.at_one)).unwrap();
    let info = pair.one.peer_info(pair.at_one).unwrap();
    assert_eq!((info.transport.as_str(), info.device), ("tcp", Some(device)));
}

pub(crate) fn unknown_settings_and_devices_are_refused() {
    let error = open_with("ucx.NO_SUCH_SETTING=1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("NO_SUCH_SETTING"), "{error}");
    // 1.13 takes no setting of TCP so, whatever its value.
    for setting in ["TCP_KEEPIDLE=never", "TCP_TX_SEG_SIZE=garbage", "KEEPALIVE_INTERVAL=often"] {
        let error = open_with(&format!("tls=tcp,ucx.{setting}")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(setting.split('=').next().unwrap()), "{error}");
    }
    open_with("ucx.ZCOPY_THRESH=64k,ucx.MM_ERROR_HANDLING=y").unwrap();
    for wrong in ["devices=nosuch0,tls=tcp", "tls=nosuch"] {
        let begin = std::time::Instant::now();
        let error = open_with(wrong).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("nosuch"), "{wrong}: {error}");
        assert!(begin.elapsed().as_secs() < 2);
    }
}

pub(crate) fn another_library_is_refused() {
    let probe = |text: &str| (kvx_ucx::REGISTRATION.probe)(&text.parse::<BackendConfig>().unwrap());
    let Probe::Available { detail, capabilities } = probe("") else { panic!("not available") };
    assert!(detail.contains("UCX 1.") && detail.contains("tcp/"), "{detail}");
    capabilities.check().unwrap();
    assert!(!detail.contains("hold up"), "{detail}");
    // What it is told to do though it cannot do it well.
    let Probe::Available { detail, .. } = probe("tls=sm+self,ucx.MM_ERROR_HANDLING=y") else {
        panic!("not available")
    };
    assert!(detail.contains("may hold up all others"), "{detail}");
    // A wrong option: what is wrong is that this process has one already.
    let Probe::BadOptions { reason, remedy } = probe("lib=/nowhere/libucp.so.0") else {
        panic!("a second library was looked for");
    };
    assert!(reason.contains("/nowhere") && remedy.is_some(), "{reason}");
}

/// What UCX would end the process for, or say no more of than that it failed.
pub(crate) fn what_would_end_the_process_is_refused() {
    const TEST: &str = "what_would_end_the_process_is_refused";
    for (name, value) in [
        ("UCX_MAX_EAGER_LANES", "junk"),
        ("UCX_LOG_FILE", "/nonexistent/x"),
        ("UCX_KEEPALIVE_INTERVAL", "abc"),
        ("UCX_TCP_TX_SEG_SIZE", "junk"),
    ] {
        alone(TEST, &[(name, value)], || {
            // In a process that is started for this, it is one of them, and for the last time nothing is wrong but a limit.
            let all = ["UCX_MAX_EAGER_LANES", "UCX_LOG_FILE", "UCX_KEEPALIVE_INTERVAL"];
            let given = all.into_iter().find(|name| std::env::var_os(name).is_some());
            let given = given.unwrap_or("UCX_TCP_TX_SEG_SIZE");
            let (result, lines) = lines_of(|| open_with("tls=tcp"));
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(error.message().contains(given) && error.remedy().is_some(), "{error}");
            assert_eq!(lines, [""; 0]);
        });
    }
}

/// With too few descriptors UCX may end the process, too.
pub(crate) fn too_few_descriptors_are_counted() {
    alone("too_few_descriptors_are_counted", &[], || {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        let most = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(open + 8), maximum: most }).unwrap();
        let error = open_with("tls=tcp").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Resources, "{error}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("ulimit -n")), "{error}");
        setrlimit(Resource::Nofile, Rlimit { current: Some(open + 100), maximum: most }).unwrap();
        open_with("tls=tcp").unwrap();
    });
}

/// What UCX knows and can read, and cannot do: the advice names it. Later versions find that out when the worker is made.
pub(crate) fn settings_that_ucx_cannot_do_are_named() {
    let error = open_with("tls=tcp,ucx.ZCOPY_THRESH=much").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("cannot read the setting ZCOPY_THRESH=much"), "{error}");
    for setting in ["TCP_TX_SEG_SIZE=10", "TCP_AF_PRIO=ipx"] {
        let error = open_with(&format!("tls=tcp,ucx.{setting}")).unwrap_err();
        let (named, remedy) = (setting.split('=').next().unwrap(), error.remedy().unwrap());
        if is_1_13() {
            assert!(
                error.kind() == ErrorKind::Config && error.message().contains(named),
                "{error}"
            );
        } else {
            assert!(remedy.contains(&format!("as UCX was told: ucx.{setting}")), "{error}");
        }
    }
}

pub(crate) fn wrong_settings_are_seen_however_little_is_logged() {
    const TEST: &str = "wrong_settings_are_seen_however_little_is_logged";
    let file = std::env::temp_dir().join(format!("kvx-ucx-log-{}", std::process::id()));
    let file = file.to_str().unwrap();
    for variables in [
        &[("UCX_LOG_LEVEL", "error")][..],
        &[("UCX_LOG_LEVEL", "fatal")],
        &[("UCX_LOG_FILE", file)],
        &[("UCX_LOG_FILE", file), ("UCX_LOG_LEVEL", "error")],
    ] {
        alone(TEST, variables, || {
            // The file is another in a process that is started for this.
            let file = std::env::var("UCX_LOG_FILE").ok();
            let logged =
                || file.as_ref().map(|file| std::fs::read_to_string(file).unwrap_or_default());
            let quiet = std::env::var_os("UCX_LOG_LEVEL").is_some();
            for setting in ["NO_SUCH_SETTING=1", "TCP_KEEPIDLE=never", "TCP_NO_SUCH=1"] {
                let (named, _) = setting.split_once('=').unwrap();
                let (result, lines) = lines_of(|| open_with(&format!("tls=tcp,ucx.{setting}")));
                let error = result.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Config, "{error}");
                assert!(error.message().contains(named), "{error}");
                assert_eq!(lines, [""; 0], "{setting}");
            }
            // Warnings that nobody asked for are not in the file, and others are.
            let (result, lines) = lines_of(|| open_with("tls=tcp+nosuch"));
            result.unwrap();
            let warned = lines.iter().filter(|line| line.contains("nosuch")).count();
            assert_eq!(warned, 0, "{lines:?}");
            // An error has UCX write what it has kept.
            open_with("tls=tcp,ucx.ZCOPY_THRESH=much").unwrap_err();
            if let Some(logged) = logged() {
                assert_eq!(logged.contains("nosuch"), !quiet, "{logged}");
            }
        });
    }
    // It may be that nothing was logged.
    let _ = std::fs::remove_file(file);
}

/// What could never be connected is not opened: shared memory alone, which does not report the death of a peer unless told to, and
/// interfaces that are not here.
pub(crate) fn what_no_transport_can_do_is_said() {
    for (options, named, advised) in [
        ("tls=posix", "tls=posix", "MM_ERROR_HANDLING"),
        ("tls=sm+self", "found=", "MM_ERROR_HANDLING"),
        ("devices=nosuch0", "devices=nosuch0", "use what is here"),
        ("ucx.NET_DEVICES=nosuch0", "'nosuch0' is not available", "use what is here"),
    ] {
        let error = open_with(options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains(named), "{options}: {error}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains(advised)), "{error}");
    }
    open_with("tls=sm,ucx.MM_ERROR_HANDLING=y").unwrap();
    // What the two do not have in common: both sides' networks are named.
    let one = open_with(&format!("tls=tcp,devices={}", lasting_interface())).unwrap();
    let error = meet_in_vain(&one, &open_with("tls=sm,ucx.MM_ERROR_HANDLING=y").unwrap());
    // It does not change by itself.
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    let (text, device) = (error.to_string(), lasting_interface());
    // With 1.13 it is seen by the one that begins, otherwise by the other.
    let (here, there) = if is_1_13() {
        (format!("tcp/{device}"), "none".into())
    } else {
        ("none".into(), format!("tcp/{device}"))
    };
    assert!(text.contains(&format!("here={here}, the peer has={there}")), "{text}");
    assert!(!text.contains("no debug data"), "{text}");
}
