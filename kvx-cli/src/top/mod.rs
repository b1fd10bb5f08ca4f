//! `kvx top`: what an engine does, while it does it.

use std::future::poll_fn;
use std::io::{self, IsTerminal as _};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::{Duration, Instant};

use kvx_core::Result;
use serde_json::json;

use crate::args::TopArgs;
use crate::fabric;
use crate::failure::{self, Failure};
use crate::metrics::Page;
use crate::output::Output;

mod fetch;
mod sums;
#[cfg(test)]
mod tests;
mod view;

use sums::Sums;

/// Clears the screen, and begins at its top.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// What was seen at one time.
struct Look {
    page: Page,
    at: Instant,
    sums: Sums,
}

impl Look {
    async fn take(address: &str) -> Result<Self> {
        let page = fetch::status(address).await?;
        let sums = Sums::of(&page);
        Ok(Self { page, at: Instant::now(), sums })
    }
}

/// Runs `kvx top`; gives the exit code.
///
/// # Errors
///
/// Nobody answers at the address, or something else than kvx; standard output cannot be written.
pub(crate) fn run(args: &TopArgs, out: &mut Output) -> Result<u8, Failure> {
    let address = match args.address.parse::<u16>() {
        Ok(port) => format!("127.0.0.1:{port}"),
        Err(_) => args.address.clone(),
    };
    fabric::runtime()?.block_on(async {
        let stop = async {
            if tokio::signal::ctrl_c().await.is_err() {
                // Then it ends as a program does that listens to no signal.
                std::future::pending::<()>().await;
            }
        };
        let mut stop = pin!(stop);
        match unless(stop.as_mut(), watch(args, &address, out)).await {
            Some(done) => done,
            None => Ok(failure::OK),
        }
    })
}

async fn watch(args: &TopArgs, address: &str, out: &mut Output) -> Result<u8, Failure> {
    let mut last = Look::take(address).await?;
    if out.is_json() || args.once {
        let totals = serde_json::to_value(&last.sums).map_err(io::Error::from)?;
        out.document(&json!({
            "version": last.page.version, "totals": totals, "engines": last.page.engines,
        }))?;
        out.line(view::frame(address, &last.page, &last.sums, None))?;
        return Ok(failure::OK);
    }
    let clear = if io::stdout().is_terminal() { CLEAR } else { "" };
    out.line(format!("{clear}{}", view::frame(address, &last.page, &last.sums, None)))?;
    loop {
        tokio::time::sleep(Duration::from_secs(args.seconds)).await;
        match Look::take(address).await {
            Ok(look) => {
                let since = Some((&last.sums, look.at.saturating_duration_since(last.at)));
                let frame = view::frame(address, &look.page, &look.sums, since);
                out.line(format!("{clear}{frame}"))?;
                last = look;
            }
            // It may come back; the reader sees why nothing is shown.
            Err(error) => out.line(format!("{clear}{}", failure::line(&error)))?,
        }
    }
}

/// Does something, unless `stop` comes first.
async fn unless<T>(
    mut stop: Pin<&mut impl Future<Output = ()>>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => stop.as_mut().poll(context).map(|()| None),
    })
    .await
}
