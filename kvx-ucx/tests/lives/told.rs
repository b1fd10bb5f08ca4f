//! What a program is told of UCX's warnings and errors.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use kvx_core::config::BackendConfig;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::pair::{is_1_13, meet_in_vain, open_with};

/// Keeps warnings and errors.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<String>>>);

impl Subscriber for Kept {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
                write!(self.0, "{value:?} ").unwrap();
            }
        }
        let mut text = Text(format!("{} ", event.metadata().level()));
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Runs something. Warnings and errors that were logged meanwhile, by this thread.
pub(crate) fn lines_of<R>(act: impl FnOnce() -> R) -> (R, Vec<String>) {
    let kept = Kept::default();
    let result = tracing::subscriber::with_default(kept.clone(), act);
    let lines = std::mem::take(&mut *kept.0.lock().unwrap());
    (result, lines)
}

/// One cause is told once: by the error, or by the log where there is none.
pub(crate) fn what_an_error_says_is_not_logged_too() {
    let setting = if is_1_13() { "ZCOPY_THRESH=much" } else { "TCP_TX_SEG_SIZE=much" };
    for options in [&format!("tls=tcp,ucx.{setting}"), "tls=nosuch", "devices=nosuch0,tls=tcp"] {
        let (result, lines) = lines_of(|| open_with(options));
        let text = result.unwrap_err().to_string();
        assert_eq!(lines, [""; 0], "{options}: {text}");
        let causes: Vec<&str> = text.split("said=").skip(1).collect();
        assert!(!causes.is_empty(), "{options}: {text}");
        for (at, cause) in causes.iter().enumerate() {
            let cause = cause.split([',', ')']).next().unwrap();
            let again = causes[at + 1..].iter().any(|other| other.starts_with(cause));
            assert!(!again, "{options}: {cause:?} is there twice: {text}");
        }
        let (_, lines) =
            lines_of(|| (kvx_ucx::REGISTRATION.probe)(&options.parse::<BackendConfig>().unwrap()));
        assert_eq!(lines, [""; 0], "{options}");
    }
    // It may be on another host that has the transport.
    let (one, lines) = lines_of(|| open_with("tls=tcp+nosuch").unwrap());
    let warned = lines.iter().filter(|line| line.starts_with("WARN") && line.contains("nosuch"));
    assert_eq!((warned.count(), lines.len()), (1, 1), "{lines:?}");
    // An endpoint that cannot be made, however often.
    let other = open_with("tls=sm,ucx.MM_ERROR_HANDLING=y").unwrap();
    let (error, lines) = lines_of(|| meet_in_vain(&one, &other));
    assert!(error.to_string().contains("said="), "{error}");
    assert_eq!(lines, [""; 0], "{error}");
}
